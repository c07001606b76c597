"""The work folder inside an unfinished cache: its lock, the chunks and shards that are done, and the plan."""
