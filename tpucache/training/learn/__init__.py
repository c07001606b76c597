"""The learning part: model, task, loss, metrics, optimizer, schedule, averaged weights. It has no files and no clock."""
