"""Complete, tiny plugin in plain torch (model, data, task, optimizer, metric and more), to test the code around it."""
