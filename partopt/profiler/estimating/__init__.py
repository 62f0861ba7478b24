"""How long the operations of a step would take on a device that is not there."""
