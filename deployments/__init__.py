"""The composition root: settings, the Serve app, the REST API, the program runner and the command line."""
