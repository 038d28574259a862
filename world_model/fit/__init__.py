"""Fitting a world model to recorded episodes, in resumable stages."""
