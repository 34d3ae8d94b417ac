"""The engine core's counts and events on their way to `/metrics` and to the gateway, by the API server's process."""
