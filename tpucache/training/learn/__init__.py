"""The learning part: model, task, loss, metrics, optimizer, schedule and averaged weights. It opens no file."""
