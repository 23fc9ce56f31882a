"""The interface to the server: the protocol, addresses and options, errors, retries."""
