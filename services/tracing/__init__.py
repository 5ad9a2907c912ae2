"""``lamella trace``: collects what the services recorded and draws it."""
