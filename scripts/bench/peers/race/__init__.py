"""What trains a network from random weights with each library's documented defaults."""
