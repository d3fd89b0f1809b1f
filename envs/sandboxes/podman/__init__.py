"""Hosts in rootless Podman: the backend, the containers it asks for, and the service and program that make them."""
