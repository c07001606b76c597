"""What learns: model, task, loss, metrics, optimizer, schedule, averaged weights. It reads no file and no clock."""
