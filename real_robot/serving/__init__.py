"""The policy server and its client: openpi's protocol over WebSocket."""
