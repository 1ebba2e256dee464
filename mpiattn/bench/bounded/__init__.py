"""Operations that `mpiattn bench --limits` measures, a module for each part of the library, and what bounds them."""
