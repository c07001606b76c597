"""What is to be done, decided before anything is done: samples numbered, cut into blocks, estimated and checked."""
