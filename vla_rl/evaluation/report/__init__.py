"""Self-contained pages about a run: charts, videos, imagination."""
