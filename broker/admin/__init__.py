"""What a broker that runs can be asked by who administers it."""
