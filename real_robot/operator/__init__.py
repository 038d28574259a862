"""The operator: devices, console, interventions, recordings."""
