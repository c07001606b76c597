"""Files and arrays -> the pixels that they hold, as they are stored."""
