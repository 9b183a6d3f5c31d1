"""Where bytes lie: objects with an identity, read by ranges."""
