"""Analytics over the broker's event log."""
