"""Tools, the sandboxes that they run in, and the history of how long they take."""
