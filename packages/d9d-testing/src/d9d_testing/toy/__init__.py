"""A complete, tiny plugin in plain torch (model, data, task, optimizer, metric), to test everything around them."""
