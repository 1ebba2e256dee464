"""The Python side of mpiattn.h: what C, C++ and Fortran programs call.  `source/` has their headers and the library."""
