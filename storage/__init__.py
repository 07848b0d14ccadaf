"""Where messages wait: the backing queue interface and what implements it."""
