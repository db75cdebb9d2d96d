"""PTX translated to C++ that the SIMT emulator runs; see tools/ptx_to_cpp.py."""
