"""Which replica a program goes to: placement, bindings and the Ray Serve request router that applies them."""
