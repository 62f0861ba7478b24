"""What links achieve, from measured seconds to a topology: no device and no torch here."""
