"""Running plans on the hosts of a Ray cluster: a worker on each host, and a driver that holds no accelerator."""
