"""States on disk: which are written, how a file is trusted, and how a request begins with one after a restart."""
