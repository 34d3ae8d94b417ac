"""Where the prefix of a prompt ends that other requests share."""
