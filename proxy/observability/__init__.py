"""Why requests hit or missed the cache, and what is lost without the plugin."""
