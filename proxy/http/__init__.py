"""HTTP and JSON as bytes, towards clients and towards workers; API keys. No policy."""
