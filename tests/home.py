"""A model that says which server is the home of a name, by rendezvous hashing."""


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def home_of(servers_named, name):
    route = name.rpartition("/")[0] if "/" in name else name
    weigh = lambda server: mix(fnv1a(server) ^ mix(fnv1a(route)))  # noqa: E731
    return max(sorted(servers_named), key=weigh)
