"""Policies: settings for queues and exchanges by the pattern of their names."""
