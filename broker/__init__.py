"""The broker: connections, channels, exchanges, queues."""
