! mpiattn: exact attention for sequences that are spread over the ranks of an MPI program, from Fortran 2008.
!
!     use mpiattn
!     type(mpiattn_plan) :: plan
!     call mpiattn_plan_create(comm, 'seqlen=4096, heads=8, head_dim=64, causal=1, timeout=60', plan, status)
!     if (status /= MPIATTN_OK) print *, mpiattn_last_error()
!     call mpiattn_forward(plan, q, k, v, out, lse=lse, status=status)
!
! Compile this file with your compiler: it includes mpiattn_c.inc and mpiattn_reals.inc, which lie beside it.  What each
! call does is said in mpiattn.h, and every option by the Python interface (docs/api.md).  docs/fortran.md explains:
!
! - Array dimensions are those of C in reverse, so that the memory is the same: q(head_dim, heads, tokens, batch).
! - Every subroutine sets `status`, its last argument, to MPIATTN_OK or to another status.  None stops the program.
! - comm is a default integer: that of `mpi` and mpif.h, or comm%MPI_VAL of mpi_f08.
! - Positions, sequences and ranks are counted from 0.  A dimension, `dim`, is counted from 1.
! - No array is copied on its way to mpiattn, also no section that is not contiguous: its strides are passed.

include 'mpiattn_c.inc'

! All of the module mpiattn but what depends on the kind of reals.
module mpiattn_base
  use, intrinsic :: iso_c_binding, only: c_associated, c_char, c_double, c_f_pointer, c_funloc, c_int, &
    c_int64_t, c_intptr_t, c_loc, c_null_char, c_null_funptr, c_null_ptr, c_ptr, c_size_t
  use, intrinsic :: iso_fortran_env, only: int32, int64, real32, real64
  use mpiattn_c
  implicit none
  private

  public :: mpiattn_plan, mpiattn_cache, mpiattn_options, mpiattn_array, mpiattn_output
  public :: MPIATTN_OK, MPIATTN_ERR_ARGUMENT, MPIATTN_ERR_HANDLE, MPIATTN_ERR_CALL, MPIATTN_ERR_PEER, MPIATTN_ERR_MPI
  public :: MPIATTN_ERR_FILE, MPIATTN_ERR_VERIFY, MPIATTN_ERR_MEMORY, MPIATTN_ERR_PYTHON, MPIATTN_ERR_OTHER
  public :: MPIATTN_ERR_INTERRUPT
  public :: MPIATTN_FLOAT16, MPIATTN_BFLOAT16, MPIATTN_FLOAT32, MPIATTN_FLOAT64, MPIATTN_INT32, MPIATTN_INT64
  public :: MPIATTN_MAX_AXES
  public :: mpiattn_last_error, mpiattn_failed_ranks, mpiattn_print_error, mpiattn_interrupt
  public :: mpiattn_start, mpiattn_version, mpiattn_set_output, mpiattn_text_at
  public :: mpiattn_options_create, mpiattn_options_free, mpiattn_set, mpiattn_unset
  public :: mpiattn_array_of, mpiattn_permuted, mpiattn_measured
  public :: mpiattn_plan_create, mpiattn_plan_like, mpiattn_plan_free, mpiattn_plan_integer, mpiattn_plan_text
  public :: mpiattn_plan_positions, mpiattn_plan_bias_positions
  public :: mpiattn_forward, mpiattn_backward, mpiattn_verify
  public :: mpiattn_scatter, mpiattn_gather, mpiattn_scatter_bias, mpiattn_gather_bias
  public :: mpiattn_cache_create, mpiattn_cache_load, mpiattn_cache_save, mpiattn_cache_free, mpiattn_cache_append
  public :: mpiattn_cache_truncate, mpiattn_cache_integer, mpiattn_cache_lengths, mpiattn_cache_positions
  public :: mpiattn_tree_decode

  ! call mpiattn_set(options, name, value, status).  The value is a text, logical, integer(int32 or int64) or
  ! real(real32 or real64), a list of integers or logicals, which are copied, or an array of reals of rank 1 to 5 or
  ! mpiattn_array, which is not copied: the variable must have the attribute target, and stay as long as calls get
  ! these options.  call mpiattn_set(options, 'layout', plan, keys, status): the layout of a plan's queries or keys.
  interface mpiattn_set
    module procedure set_text, set_logical, set_int32, set_int64, set_real32, set_real64, set_logicals, set_int32s
    module procedure set_int64s, set_array, set_layout
  end interface

  ! mpiattn_array_of(x): a variable x of reals, of rank 1 to 5, which must have the attribute target.
  ! mpiattn_array_of(address, dtype, lengths, strides): any memory, such as c_loc(x) of 16-bit numbers, or a GPU's.
  interface mpiattn_array_of
    module procedure array_at
  end interface

  interface mpiattn_plan_create
    module procedure plan_create, plan_create_text
  end interface
  interface mpiattn_forward
    module procedure forward
  end interface
  interface mpiattn_backward
    module procedure backward
  end interface
  interface mpiattn_verify
    module procedure verify
  end interface
  interface mpiattn_scatter
    module procedure scatter
  end interface
  interface mpiattn_gather
    module procedure gather
  end interface
  interface mpiattn_scatter_bias
    module procedure scatter_bias
  end interface
  interface mpiattn_gather_bias
    module procedure gather_bias
  end interface
  interface mpiattn_cache_create
    module procedure cache_create, cache_create_text
  end interface
  interface mpiattn_cache_append
    module procedure cache_append
  end interface
  interface mpiattn_tree_decode
    module procedure tree_decode
  end interface

  integer, parameter :: LONGEST = 65536  ! bytes of a text of a plan

contains

  include 'mpiattn_values.inc'
  include 'mpiattn_calls.inc'
end module

module mpiattn_real32
  use, intrinsic :: iso_c_binding, only: c_loc, c_null_ptr
  use, intrinsic :: iso_fortran_env, only: int64, real64, wp => real32
  use mpiattn_base
  include 'mpiattn_reals.inc'
end module

module mpiattn_real64
  use, intrinsic :: iso_c_binding, only: c_loc, c_null_ptr
  use, intrinsic :: iso_fortran_env, only: int64, real64, wp => real64
  use mpiattn_base
  include 'mpiattn_reals.inc'
end module

! The module that programs use.
module mpiattn
  use mpiattn_base
  use mpiattn_real32
  use mpiattn_real64
  implicit none
  public
  private :: mpiattn_measured
end module
