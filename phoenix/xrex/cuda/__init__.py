"""Components with native code for accelerators."""
