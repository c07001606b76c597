"""Three epochs of random crops and flips of photographs, a module each library."""
