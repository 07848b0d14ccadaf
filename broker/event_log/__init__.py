"""The event log: what happened to every message and object, as JSON lines."""
