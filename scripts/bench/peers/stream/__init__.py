"""Those who read from a URL. Each module needs what its library needs alone."""
