"""The interface to the server: the protocol, addresses, options, errors and retries."""
