! Tracers of an ocean model that are carried and mixed, and attention of every point of the grid to those around it.
!
!     mpiattn-config --build
!     mpifort ocean.f90 $(mpiattn-config --fflags --fortran-libs) -o ocean
!     mpiexec -n 7 ./ocean FOLDER
!
! The program is a finite-difference code as there are many.  The last rank, if there are several, writes the log.  The
! others have a communicator of their own, Cartesian, on which each holds a block with a border of ghost points.  What
! attention takes in such a code:
!
! - A plan, with the grid and the Cartesian communicator.  mpiattn counts axes as C does, the last one fastest.  A field
!   f(nx, ny) of Fortran is therefore the grid "ny x nx", and the communicator's dims are (y, x), in this order.
! - q, k and v of the block's own points, without ghosts: q(DIM, HEADS, nx * ny, 1).  The points are in the order in
!   which a field f(nx, ny) has them in memory.
!
! Every tenth step the points attend to each other, and what they get is added to the tracers.  The backward pass gives
! the sensitivity of a loss to the tracers at every point.  The last such step is written to FOLDER, a file a rank.

module ocean_model
  use, intrinsic :: iso_fortran_env, only: int64, real32, real64
  use mpi_f08
  use mpiattn
  implicit none

  integer, parameter :: GRID_X = 26, GRID_Y = 19, TRACERS = 3, HEADS = 2, DIM = 8, STEPS = 30, EVERY = 10
  real(real64), parameter :: DIFFUSION = 0.1_real64, PI = acos(-1.0_real64)

  ! The block of a rank.  tracers(:, 0:nx+1, 0:ny+1) has ghost points around those of the block.
  type :: block
    type(MPI_Comm) :: cart
    integer :: dims(2), rank, nx, ny, first_x, first_y, west, east, south, north
    real(real64), allocatable :: tracers(:, :, :)
  end type

contains

  ! Points of a part, counted from 0, of n points in several parts.  The first parts have a point more than the last if
  ! n does not divide: this is how mpiattn divides a grid.  `before`: the points of the parts before it.
  pure subroutine share(n, parts, part, points, before)
    integer, intent(in) :: n, parts, part
    integer, intent(out) :: points, before
    points = n / parts + merge(1, 0, part < mod(n, parts))
    before = part * (n / parts) + min(part, mod(n, parts))
  end subroutine

  ! The ocean goes round the globe along x and has walls along y.
  subroutine make_block(comm, b)
    type(MPI_Comm), intent(in) :: comm
    type(block), intent(out) :: b
    integer :: coords(2), ranks, x, y, i
    call MPI_Comm_size(comm, ranks)
    b%dims = 0
    call MPI_Dims_create(ranks, 2, b%dims)
    call MPI_Cart_create(comm, 2, b%dims, [.false., .true.], .true., b%cart)  ! (y, x)
    call MPI_Comm_rank(b%cart, b%rank)
    call MPI_Cart_coords(b%cart, b%rank, 2, coords)
    call MPI_Cart_shift(b%cart, 0, 1, b%south, b%north)
    call MPI_Cart_shift(b%cart, 1, 1, b%west, b%east)
    call share(GRID_Y, b%dims(1), coords(1), b%ny, b%first_y)
    call share(GRID_X, b%dims(2), coords(2), b%nx, b%first_x)
    allocate (b%tracers(TRACERS, 0:b%nx + 1, 0:b%ny + 1))
    do y = 1, b%ny
      do x = 1, b%nx
        b%tracers(:, x, y) = [(sin(2 * PI * i * (b%first_x + x) / GRID_X) * cos(PI * i * (b%first_y + y) / GRID_Y), &
          i=1, TRACERS)]
      end do
    end do
  end subroutine

  ! Ghost points get the points of the neighbours, and beyond a wall the values before it.
  subroutine exchange(b)
    type(block), intent(inout) :: b
    real(real64), dimension(TRACERS, b%nx) :: row
    real(real64), dimension(TRACERS, b%ny) :: sent, column
    associate (t => b%tracers, nx => b%nx, ny => b%ny)
      row = t(:, 1:nx, 1)  ! what stays where there is no neighbour
      call MPI_Sendrecv(t(:, 1:nx, ny), size(row), MPI_DOUBLE_PRECISION, b%north, 0, &
        row, size(row), MPI_DOUBLE_PRECISION, b%south, 0, b%cart, MPI_STATUS_IGNORE)
      t(:, 1:nx, 0) = row
      row = t(:, 1:nx, ny)
      call MPI_Sendrecv(t(:, 1:nx, 1), size(row), MPI_DOUBLE_PRECISION, b%south, 1, &
        row, size(row), MPI_DOUBLE_PRECISION, b%north, 1, b%cart, MPI_STATUS_IGNORE)
      t(:, 1:nx, ny + 1) = row
      sent = t(:, nx, 1:ny)
      call MPI_Sendrecv(sent, size(sent), MPI_DOUBLE_PRECISION, b%east, 2, &
        column, size(column), MPI_DOUBLE_PRECISION, b%west, 2, b%cart, MPI_STATUS_IGNORE)
      t(:, 0, 1:ny) = column
      sent = t(:, 1, 1:ny)
      call MPI_Sendrecv(sent, size(sent), MPI_DOUBLE_PRECISION, b%west, 3, &
        column, size(column), MPI_DOUBLE_PRECISION, b%east, 3, b%cart, MPI_STATUS_IGNORE)
      t(:, nx + 1, 1:ny) = column
    end associate
  end subroutine

  ! A step of advection along x, faster in the middle, and diffusion.
  subroutine step(b)
    type(block), intent(inout) :: b
    real(real64) :: old(TRACERS, 0:b%nx + 1, 0:b%ny + 1), current
    integer :: x, y
    call exchange(b)
    old = b%tracers
    do y = 1, b%ny
      current = 0.4_real64 * sin(PI * (b%first_y + y) / (GRID_Y + 1))
      do x = 1, b%nx
        b%tracers(:, x, y) = old(:, x, y) - current * (old(:, x, y) - old(:, x - 1, y)) + DIFFUSION * &
          (old(:, x - 1, y) + old(:, x + 1, y) + old(:, x, y - 1) + old(:, x, y + 1) - 4 * old(:, x, y))
      end do
    end do
  end subroutine

  ! Fixed numbers in place of weights that somebody has trained.
  pure function weights(seed) result(w)
    integer, intent(in) :: seed
    real(real32) :: w(DIM * HEADS, TRACERS)
    integer :: i, j
    w = reshape([((sin(real(seed * (i + 3 * j) * (i + j + 1), real32)), i=1, DIM * HEADS), j=1, TRACERS)], shape(w))
  end function

  ! Points attend to each other, and what they get is added to the tracers.  loss: half the mean square of this change,
  ! of the whole grid.  sensitivity: the norm of the loss's gradient with respect to the tracers.
  subroutine attend(b, plan, file, loss, sensitivity)
    type(block), intent(inout) :: b
    type(mpiattn_plan), intent(in) :: plan
    character(*), intent(in) :: file
    real(real64), intent(out) :: loss, sensitivity
    real(real32), allocatable, dimension(:, :, :, :) :: q, k, v, out, dout, dq, dk, dv
    real(real32), allocatable :: lse(:, :, :)
    real(real32) :: w(DIM * HEADS, TRACERS, 4), here(TRACERS), change(TRACERS)
    integer :: x, y, i, unit, status
    allocate (q(DIM, HEADS, b%nx * b%ny, 1), lse(b%nx * b%ny, HEADS, 1))
    allocate (k, v, out, dout, dq, dk, dv, mold=q)
    w = reshape([(weights(i), i=1, 4)], shape(w))
    do y = 1, b%ny
      do x = 1, b%nx
        i = x + b%nx * (y - 1)
        here = real(b%tracers(:, x, y), real32)
        q(:, :, i, 1) = reshape(matmul(w(:, :, 1), here), [DIM, HEADS])
        k(:, :, i, 1) = reshape(matmul(w(:, :, 2), here), [DIM, HEADS])
        v(:, :, i, 1) = reshape(matmul(w(:, :, 3), here), [DIM, HEADS])
      end do
    end do
    loss = 0
    sensitivity = 0
    call mpiattn_forward(plan, q, k, v, out, lse, status=status)
    call check(status, b)
    do y = 1, b%ny
      do x = 1, b%nx
        i = x + b%nx * (y - 1)
        change = matmul(reshape(out(:, :, i, 1), [DIM * HEADS]), w(:, :, 4)) / (DIM * HEADS)
        b%tracers(:, x, y) = b%tracers(:, x, y) + 0.1_real64 * change
        loss = loss + sum(change**2) / 2 / (GRID_X * GRID_Y)
        dout(:, :, i, 1) = reshape(matmul(w(:, :, 4), change) / (DIM * HEADS) / (GRID_X * GRID_Y), [DIM, HEADS])
      end do
    end do
    call mpiattn_backward(plan, dout, q, k, v, out, lse, dq, dk, dv, status=status)
    call check(status, b)
    do i = 1, b%nx * b%ny
      here = matmul(reshape(dq(:, :, i, 1), [DIM * HEADS]), w(:, :, 1)) + &
        matmul(reshape(dk(:, :, i, 1), [DIM * HEADS]), w(:, :, 2)) + &
        matmul(reshape(dv(:, :, i, 1), [DIM * HEADS]), w(:, :, 3))
      sensitivity = sensitivity + sum(here**2)
    end do
    call MPI_Allreduce(MPI_IN_PLACE, loss, 1, MPI_DOUBLE_PRECISION, MPI_SUM, b%cart)
    call MPI_Allreduce(MPI_IN_PLACE, sensitivity, 1, MPI_DOUBLE_PRECISION, MPI_SUM, b%cart)
    sensitivity = sqrt(sensitivity)
    if (file == '') return
    open (newunit=unit, file=file, access='stream', form='unformatted', status='replace')
    write (unit) q, k, v, dout, out, lse, dq, dk, dv
    close (unit)
  end subroutine

  ! All ranks come here with the same error, or one with its own: rank 0 prints before the others.
  subroutine check(status, b)
    integer, intent(in) :: status
    type(block), intent(in) :: b
    if (status == MPIATTN_OK) return
    call mpiattn_print_error(b%rank)
    call MPI_Abort(MPI_COMM_WORLD, 1)
    stop 1  ! MPI_Abort of MPICH 5 may return before the launcher ends the process
  end subroutine

  ! The model on its ranks.  logger: the rank of MPI_COMM_WORLD that writes the log.
  subroutine model(comm, logger, folder)
    type(MPI_Comm), intent(in) :: comm
    integer, intent(in) :: logger
    character(*), intent(in) :: folder
    type(block) :: b
    type(mpiattn_plan) :: plan
    character(1000) :: text
    character(:), allocatable :: tile
    integer :: n, status
    integer(int64) :: tokens
    real(real64) :: loss, sensitivity
    call make_block(comm, b)
    write (text, '(4(a, i0), a)') 'grid=', GRID_Y, 'x', GRID_X, ', heads=', HEADS, ', head_dim=', DIM, &
      ', mask=neighborhood 5x7 cyclic=1, direction=both, timeout=60'
    call mpiattn_plan_create(b%cart%MPI_VAL, text, plan, status)
    call check(status, b)
    call mpiattn_plan_integer(plan, 'tokens', tokens, status)
    call check(status, b)
    if (tokens /= b%nx * b%ny) error stop 'mpiattn divides the grid in another way'
    call mpiattn_plan_text(plan, 'tile', tile, status)
    call check(status, b)
    if (b%rank == 0) print '(a, i0, a, i0, 4a)', 'blocks ', b%dims(1), 'x', b%dims(2), ', tile ', tile, &
      ', mpiattn ', mpiattn_version()
    do n = 1, STEPS
      call step(b)
      if (mod(n, EVERY) /= 0) cycle
      text = ''
      if (n == STEPS) write (text, '(2a, i0)') folder, '/ocean.', b%rank
      call attend(b, plan, trim(text), loss, sensitivity)
      if (b%rank == 0) call report(logger, [real(n, real64), loss, sensitivity])
    end do
    call mpiattn_plan_free(plan, status)
    call check(status, b)
    if (b%rank == 0) call report(logger, [0.0_real64, 0.0_real64, 0.0_real64])
    call MPI_Comm_free(b%cart)
  end subroutine

  ! numbers: of the step, the loss and the sensitivity; step 0 ends the log.  logger: this rank, or where they are sent.
  subroutine report(logger, numbers)
    integer, intent(in) :: logger
    real(real64), intent(in) :: numbers(3)
    integer :: rank
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    if (rank /= logger) then
      call MPI_Send(numbers, 3, MPI_DOUBLE_PRECISION, logger, 0, MPI_COMM_WORLD)
    else if (numbers(1) > 0) then
      print '(a, i0, 2(a, es12.6))', 'step ', nint(numbers(1)), ': loss ', numbers(2), '  sensitivity ', numbers(3)
    end if
  end subroutine
end module

program ocean
  use ocean_model
  implicit none
  type(MPI_Comm) :: comm
  integer :: rank, ranks
  real(real64) :: numbers(3)
  character(500) :: folder
  call get_command_argument(1, folder)
  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, rank)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  call MPI_Comm_split(MPI_COMM_WORLD, merge(1, 0, ranks > 1 .and. rank == ranks - 1), rank, comm)
  if (ranks == 1 .or. rank < ranks - 1) then
    call model(comm, ranks - 1, trim(folder))
  else
    do
      call MPI_Recv(numbers, 3, MPI_DOUBLE_PRECISION, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE)
      call report(rank, numbers)
      if (numbers(1) < 1) exit
    end do
  end if
  call MPI_Comm_free(comm)
  call MPI_Finalize()
end program
