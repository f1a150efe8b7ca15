"""The memory of the machine beside the device's: what is copied there and back, and how much there is."""
