"""One proxied request from its first to its last byte, and the composition of all parts of a gateway."""
