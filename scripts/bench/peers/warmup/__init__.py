"""Ways of preparing photographs, a module each."""
