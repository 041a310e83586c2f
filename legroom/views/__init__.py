"""Ways to look at records: terminal tables, one HTML page, Perfetto traces. They change nothing."""
