"""What trains a ResNet-18 from random weights with each library's documented defaults."""
