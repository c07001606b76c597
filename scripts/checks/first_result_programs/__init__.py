"""What a user writes with each library to get shuffled batches of a folder of photographs, one subfolder a class."""
