"""A request of any API as one chat: what it says, its content keys, its rewrites, its usage."""
