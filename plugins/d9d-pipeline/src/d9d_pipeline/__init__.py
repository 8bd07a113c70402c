"""Pipeline parallelism: schedules as data, their simulator, and the handlers that run them."""
