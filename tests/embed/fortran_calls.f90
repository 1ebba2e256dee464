! Calls every procedure of the module mpiattn.  `mpiexec -n N fortran_calls FOLDER`: each rank writes FOLDER/calls.RANK,
! arrays by name, that fortran_twin.py compares with those of Python; exit code 1 if a check here fails.
!
! A record is a name of 16 letters, two integers (the kind, 4, 8 or -8 for int64, and the rank), the shape, the numbers.

module records
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit, int16, int32, int64, real32, real64
  use mpi_f08
  use mpiattn
  implicit none
  integer :: me, ranks, unit, wrong = 0

contains

  subroutine check(right, what)
    logical, intent(in) :: right
    character(*), intent(in) :: what
    if (right) return
    write (error_unit, '(a, i0, 4a)') 'rank ', me, ': ', what, ': ', mpiattn_last_error()
    wrong = 1
  end subroutine

  subroutine done(status, what)
    integer, intent(in) :: status
    character(*), intent(in) :: what
    call check(status == MPIATTN_OK, what)
  end subroutine

  ! Whether a call is refused with this status, and the text has these words.
  subroutine refused(status, wanted, words)
    integer, intent(in) :: status, wanted
    character(*), intent(in) :: words
    character(:), allocatable :: text
    text = mpiattn_last_error()
    call check(status == wanted .and. index(text, words) > 0, 'not refused with ' // words)
  end subroutine

  subroutine put(name, lengths, x)
    character(*), intent(in) :: name
    integer, intent(in) :: lengths(:)
    real(real32), intent(in) :: x(*)
    character(16) :: padded
    padded = name
    write (unit) padded, 4, size(lengths), lengths, x(:product(lengths))
  end subroutine

  subroutine put64(name, lengths, x)
    character(*), intent(in) :: name
    integer, intent(in) :: lengths(:)
    real(real64), intent(in) :: x(*)
    character(16) :: padded
    padded = name
    write (unit) padded, 8, size(lengths), lengths, x(:product(lengths))
  end subroutine

  subroutine put_integers(name, x)
    character(*), intent(in) :: name
    integer(int64), intent(in) :: x(:)
    character(16) :: padded
    padded = name
    write (unit) padded, -8, 1, size(x), x
  end subroutine

  ! Numbers between -1 and 1 that nobody would mix up.
  elemental function number(i) result(x)
    integer, intent(in) :: i
    real(real32) :: x
    x = real(sin(1.7d0 * i + 0.3d0 * mod(i, 17)), real32)
  end function

  function numbers(lengths, first) result(x)
    integer, intent(in) :: lengths(4), first
    real(real32) :: x(lengths(1), lengths(2), lengths(3), lengths(4))
    integer :: i
    x = reshape(number([(first + i, i=1, product(lengths))]), lengths)
  end function

  ! What Python prints.
  subroutine hear(text, is_error, context) bind(c, name='')
    type(c_ptr), value :: text, context
    integer(c_int), value :: is_error
    integer, pointer :: count
    character(:), allocatable :: printed
    call c_f_pointer(context, count)
    printed = mpiattn_text_at(text)
    if (is_error == 1 .and. index(printed, 'machines.json') > 0) count = count + 1
  end subroutine

  ! A rank that does not call with the others: they learn which it is.
  subroutine a_rank_that_does_not_come()
    type(mpiattn_options) :: options
    type(mpiattn_plan) :: plan
    real(real32), allocatable, target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :), out(:, :, :, :)
    integer, allocatable :: failed(:)
    integer(int64) :: n
    integer :: status
    call mpiattn_options_create('seqlen=24, heads=1, head_dim=4, timeout=1', options, status)
    call mpiattn_plan_create(MPI_COMM_WORLD%MPI_VAL, options, plan, status)
    call done(status, 'plan_create')
    call mpiattn_plan_integer(plan, 'tokens', n, status)
    allocate (q(4, 1, n, 1), k(4, 1, n, 1), v(4, 1, n, 1), out(4, 1, n, 1), source=1.0)
    if (me < ranks - 1) then
      call mpiattn_forward(plan, q, k, v, out, status=status)
      call refused(status, MPIATTN_ERR_PEER, 'rank')
      call mpiattn_failed_ranks(failed)
      call check(size(failed) == 1, 'how many ranks failed')
      call check(all(failed == ranks - 1), 'the rank that failed')
    end if
    call MPI_Barrier(MPI_COMM_WORLD)
    call mpiattn_plan_free(plan, status)
    call mpiattn_options_free(options, status)
    call done(status, 'options_free')
    call mpiattn_failed_ranks(failed)
    call check(size(failed) == 0, 'failed_ranks of a call that succeeded')
  end subroutine

  subroutine masked_plan()
    type(mpiattn_options) :: options, of_call
    type(mpiattn_plan) :: plan, other
    integer, target, save :: heard = 0
    type(mpiattn_array) :: array
    integer :: status, n
    integer(int64) :: value
    integer(int64), allocatable :: positions(:), keys(:), rows(:), columns(:)
    character(:), allocatable :: text, chosen
    real(real32), allocatable, target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :), out(:, :, :, :), lse(:, :, :)
    real(real32), allocatable, target :: whole(:, :, :, :), tile(:, :, :, :), dtile(:, :, :, :), sinks(:), dsinks(:)
    real(real32), allocatable, target :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :), whole_lse(:, :, :)
    real(real32), allocatable, target :: wide(:, :, :, :), other_way(:, :, :, :), out2(:, :, :, :)
    real(real64) :: worst

    call mpiattn_set_output(hear, c_loc(heard), status)
    call done(status, 'set_output')
    call mpiattn_options_create('layout=contiguous, direction=both, prefix=3', options, status)
    call done(status, 'options_create')
    call mpiattn_set(options, 'batch', 2, status)
    call done(status, 'an integer')
    call mpiattn_set(options, 'seqlen', 23_int64, status)
    call done(status, 'an integer of 64 bits')
    call mpiattn_set(options, 'seqlen_k', 31, status)
    call mpiattn_set(options, 'heads', 4, status)
    call mpiattn_set(options, 'kv_heads', 2, status)
    call mpiattn_set(options, 'head_dim', 8, status)
    call mpiattn_set(options, 'value_dim', 6, status)
    call mpiattn_set(options, 'causal', .true., status)
    call done(status, 'a logical')
    call mpiattn_set(options, 'window', [15, -1], status)
    call done(status, 'integers')
    call mpiattn_set(options, 'scale', 0.375_real64, status)
    call done(status, 'a real of 64 bits')
    call mpiattn_set(options, 'softcap', 2.5, status)
    call done(status, 'a real')
    call mpiattn_set(options, 'dtype', 'float32   ', status)
    call done(status, 'a text')
    call mpiattn_unset(options, 'prefix', status)
    call done(status, 'unset')
    call mpiattn_plan_create(MPI_COMM_WORLD%MPI_VAL, options, plan, status)
    call done(status, 'plan_create')
    call mpiattn_set_output(status=status)
    call done(status, 'set_output again')
    if (me == 0) call check(heard > 0, 'what Python prints was not heard')

    call mpiattn_plan_integer(plan, 'tokens', value, status)
    call done(status, 'plan_integer')
    call mpiattn_plan_positions(plan, positions, status=status)
    call done(status, 'plan_positions')
    call mpiattn_plan_positions(plan, keys, .true., status)
    call done(status, 'plan_positions of keys')
    call mpiattn_plan_bias_positions(plan, rows, status=status)
    call done(status, 'bias_positions')
    call mpiattn_plan_bias_positions(plan, columns, .true., status)
    call done(status, 'bias_positions of columns')
    call mpiattn_plan_text(plan, 'description', text, status)
    call check(status == MPIATTN_OK .and. index(text, 'MeshAttention') > 0, 'plan_text')
    call check(value == size(positions), 'tokens')
    call put_integers('positions', positions)
    call put_integers('keys', keys)
    call put_integers('rows', rows)
    call put_integers('columns', columns)

    n = size(positions)
    allocate (q(8, 4, n, 2), out(6, 4, n, 2), lse(n, 4, 2), k(8, 2, size(keys), 2), v(6, 2, size(keys), 2))
    allocate (dq, mold=q)
    allocate (dk, mold=k)
    allocate (dv, mold=v)
    if (me == 0) then
      allocate (whole(8, 4, 23, 2))
      whole = numbers(shape(whole), 0)
    end if
    call mpiattn_scatter(plan, whole, q, status=status)
    call done(status, 'scatter from rank 0')
    if (allocated(whole)) deallocate (whole)
    allocate (whole(8, 2, 31, 2))
    whole = numbers(shape(whole), 5000)
    call mpiattn_scatter(plan, whole, k, root=-1, keys=.true., status=status)
    call done(status, 'scatter from all')
    deallocate (whole)
    v = numbers(shape(v), 10000 + 7919 * me)

    allocate (sinks(4), dsinks(4), tile(size(columns), size(rows), 4, 1), dtile(size(columns), size(rows), 4, 1))
    sinks = number([1, 2, 3, 4])
    allocate (whole(31, 23, 4, 1))
    whole = numbers(shape(whole), 300)
    call mpiattn_scatter_bias(plan, whole, tile, root=-1, status=status)
    call done(status, 'scatter_bias')
    call mpiattn_options_create('', of_call, status)
    call mpiattn_set(of_call, 'cu_seqlens', [0, 10, 23], status)
    call mpiattn_set(of_call, 'cu_seqlens_k', [0_int64, 14_int64, 31_int64], status)
    call done(status, 'integers of 64 bits')
    call mpiattn_set(of_call, 'sinks', sinks, status)
    call done(status, 'an array')
    call mpiattn_set(of_call, 'bias', tile, status)
    call mpiattn_forward(plan, q, k, v, out, lse, of_call, status)
    call done(status, 'forward')
    call mpiattn_verify(plan, q, k, v, out, lse, of_call, worst, status)
    call check(status == MPIATTN_OK .and. worst > 0 .and. worst <= 1, 'verify')
    out(1, 1, 1, 1) = out(1, 1, 1, 1) + 1
    call mpiattn_verify(plan, q, k, v, out, lse, of_call, status=status)
    call refused(status, MPIATTN_ERR_VERIFY, 'out')
    out(1, 1, 1, 1) = out(1, 1, 1, 1) - 1
    call mpiattn_forward(plan, q, k, v, out, lse, of_call, status)
    call mpiattn_set(of_call, 'dsinks', dsinks, status)
    call mpiattn_set(of_call, 'dbias', dtile, status)
    call mpiattn_backward(plan, out, q, k, v, out, lse, dq, dk, dv, of_call, status)
    call done(status, 'backward')
    call mpiattn_unset(of_call, 'dsinks', status)
    call mpiattn_unset(of_call, 'dbias', status)
    call put('q', shape(q), q)
    call put('k', shape(k), k)
    call put('v', shape(v), v)
    call put('tile', shape(tile), tile)
    call put('out', shape(out), out)
    call put('lse', shape(lse), lse)
    call put('dq', shape(dq), dq)
    call put('dk', shape(dk), dk)
    call put('dv', shape(dv), dv)
    call put('dsinks', shape(dsinks), dsinks)
    call put('dbias', shape(dtile), dtile)
    whole = 0
    call mpiattn_gather_bias(plan, dtile, whole, status=status)
    call done(status, 'gather_bias')
    call put('whole_dbias', shape(whole), whole)
    deallocate (whole)
    if (me == 1) allocate (whole(6, 4, 23, 2), source=0.0_real32)
    call mpiattn_gather(plan, out, whole, root=min(1, ranks - 1), status=status)
    if (ranks > 1) call done(status, 'gather to rank 1')
    if (me == 1) call put('whole_out', shape(whole), whole)
    allocate (whole_lse(23, 4, 2))
    call mpiattn_gather(plan, lse, whole_lse, root=-1, dim=1, status=status)
    call done(status, 'gather of rank 3')
    call put('whole_lse', shape(whole_lse), whole_lse)

    ! Sections and other orders, which are not copied.
    allocate (wide(10, 5, 2 * n, 3), other_way(n, 8, 4, 2), out2(12, 4, n, 3))
    wide = -1e9
    wide(2:9, 2:5, 2::2, 2:3) = q
    array = mpiattn_array_of(wide(2:9, 2:5, 2::2, 2:3))
    call check(c_associated(array%data, c_loc(wide(2, 2, 2, 2))) .and. array%strides(4) == 1, 'a section is copied')
    out2 = -5
    call mpiattn_forward(plan, wide(2:9, 2:5, 2::2, 2:3), k, v, out2(1::2, :, :, ::2), options=of_call, status=status)
    call done(status, 'forward of sections')
    call check(all(abs(out2(1::2, :, :, ::2) - out) <= 0), 'sections give other numbers')
    call check(all(abs(out2(2::2, :, :, :) + 5) <= 0) .and. all(abs(out2(:, :, :, 2) + 5) <= 0), 'written beside out')
    other_way = reshape(q, shape(other_way), order=[2, 3, 1, 4])
    out2 = -5
    call mpiattn_forward(plan, mpiattn_permuted(mpiattn_array_of(other_way), [2, 3, 1, 4]), mpiattn_array_of(k), &
      mpiattn_array_of(v), mpiattn_array_of(out2(7:, :, :, :2)), options=of_call, status=status)
    call done(status, 'forward of another order')
    call check(all(abs(out2(7:, :, :, :2) - out) <= 0), 'another order gives other numbers')

    ! What is refused leaves the plan as it is.
    call mpiattn_forward(plan, mpiattn_permuted(mpiattn_array_of(q), [2, 3, 3, 4]), mpiattn_array_of(k), &
      mpiattn_array_of(v), mpiattn_array_of(out), status=status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'axes')
    call mpiattn_forward(plan, q(:, :3, :, :), k, v, out, lse, of_call, status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'q ')
    if (n > 1) then
      call mpiattn_forward(plan, q(:, :, n:1:-1, :), k, v, out, lse, of_call, status)
      call refused(status, MPIATTN_ERR_ARGUMENT, 'strides')
    end if
    call mpiattn_forward(plan, q, k, out=out, lse=lse, options=of_call, status=status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'v ')
    call mpiattn_set(of_call, 'sink', 3, status)
    call mpiattn_forward(plan, q, k, v, out, lse, of_call, status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'sink')
    call mpiattn_options_free(of_call, status)
    call done(status, 'options_free')
    call check(of_call%number == 0, 'the options are not none')
    call mpiattn_unset(of_call, 'sink', status)
    call refused(status, MPIATTN_ERR_HANDLE, 'options')

    call mpiattn_plan_like(plan, 12_int64, other, seqlen_k=17_int64, status=status)
    call done(status, 'plan_like')
    call mpiattn_plan_integer(other, 'seqlen_k', value, status)
    call check(value == 17, 'the other plan has other lengths')
    call mpiattn_plan_text(other, 'tile', text, status)
    call mpiattn_plan_text(plan, 'tile', chosen, status)
    call check(text == chosen, 'the other plan has another tile')
    call mpiattn_plan_free(other, status)
    call done(status, 'plan_free')
    call mpiattn_forward(other, q, k, v, out, status=status)
    call refused(status, MPIATTN_ERR_HANDLE, 'plan')

    call mpiattn_set(options, 'layout', plan, status=status)
    call done(status, 'a layout')
    call mpiattn_set(options, 'seqlen_k', 23, status)
    call mpiattn_plan_create(MPI_COMM_WORLD%MPI_VAL, options, other, status)
    call done(status, 'plan_create with a layout')
    call mpiattn_plan_positions(other, keys, keys=.true., status=status)
    call check(all(keys == positions), 'the layout is another one')
    call mpiattn_plan_free(other, status)
    call mpiattn_plan_free(plan, status)
    call mpiattn_options_free(options, status)
  end subroutine

  ! float64, on a grid, with biases by distance, on tiles that the ranks can have.
  subroutine double_plan()
    type(mpiattn_plan) :: plan
    type(mpiattn_options) :: options
    integer :: status, n
    integer(int64) :: n64
    real(real64), allocatable, target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :), out(:, :, :, :), lse(:, :, :)
    real(real64), allocatable, target :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :), table(:, :, :), slopes(:)
    real(real64), allocatable, target :: dtable(:, :, :), dslopes(:), of_keys(:, :), dlse(:, :, :)
    call mpiattn_plan_create(MPI_COMM_WORLD%MPI_VAL, &
      'seqlen=24, heads=2, head_dim=4, dtype=float64, key_bias=true, tile=bands', plan, status)
    call done(status, 'plan_create of a text')
    call mpiattn_plan_integer(plan, 'tokens', n64, status)
    n = int(n64)
    allocate (q(4, 2, n, 1), lse(n, 2, 1), dlse(n, 2, 1), table(3, 5, 2), dtable(3, 5, 2), slopes(2), dslopes(2))
    allocate (of_keys(n, 2))
    q = numbers(shape(q), 20000 + 7919 * me)
    k = numbers(shape(q), 40000 + 7919 * me)
    v = numbers(shape(q), 60000 + 7919 * me)
    table = reshape(real(numbers([3, 5, 2, 1], 700), real64), shape(table))
    of_keys = reshape(real(numbers([n, 2, 1, 1], 800 + 7919 * me), real64), shape(of_keys))
    slopes = [0.25_real64, 0.0625_real64]
    dlse = reshape(real(numbers([n, 2, 1, 1], 900 + 7919 * me), real64), shape(dlse))
    allocate (out, dq, dk, dv, mold=q)
    call mpiattn_options_create('dropout=0.25', options, status)
    call mpiattn_set(options, 'seed', 123456789012_int64, status)
    call mpiattn_set(options, 'alibi_slopes', slopes, status)
    call mpiattn_set(options, 'key_bias', of_keys, status)
    call mpiattn_set(options, 'relative_bias', table, status)
    call mpiattn_set(options, 'relative_grid', [4, 6], status)
    call mpiattn_set(options, 'relative_cyclic', [.true., .false.], status)
    call done(status, 'logicals')
    call mpiattn_forward(plan, q, k, v, out, lse, options, status)
    call done(status, 'forward in float64')
    call mpiattn_set(options, 'dlse', dlse, status)
    call mpiattn_set(options, 'drelative_bias', dtable, status)
    call mpiattn_set(options, 'dalibi_slopes', mpiattn_array_of(dslopes), status)
    call mpiattn_backward(plan, out, q, k, v, out, lse, dq=dq, dv=dv, options=options, status=status)
    call done(status, 'backward in float64, without dk')
    call put64('q64', shape(q), q)
    call put64('k64', shape(k), k)
    call put64('v64', shape(v), v)
    call put64('table', shape(table), table)
    call put64('of_keys', shape(of_keys), of_keys)
    call put64('dlse', shape(dlse), dlse)
    call put64('out64', shape(out), out)
    call put64('lse64', shape(lse), lse)
    call put64('dq64', shape(dq), dq)
    call put64('dv64', shape(dv), dv)
    call put64('dtable', shape(dtable), dtable)
    call put64('dslopes', shape(dslopes), dslopes)
    call mpiattn_options_free(options, status)
    call mpiattn_plan_free(plan, status)
    call done(status, 'plan_free')
  end subroutine

  ! bfloat16, one array for keys and values, and fewer tokens than ranks; options as Fortran writes numbers and logicals.
  subroutine half_plan()
    type(mpiattn_plan) :: plan
    integer :: status
    integer(int64), allocatable :: positions(:)
    integer(int16), allocatable, target :: q(:, :, :, :), out(:, :, :, :)
    real(real32), allocatable, target :: lse(:, :, :)
    type(mpiattn_array) :: bits
    character(200) :: text
    write (text, '(2(a, i4), a, d9.2, a, l2)') 'seqlen=', 1, ', heads=1, dtype=bfloat16, head_dim=', 4, &
      ', scale=', 0.5d0, ', shared_kv=', .true.
    call mpiattn_plan_create(MPI_COMM_WORLD%MPI_VAL, text, plan, status)
    call done(status, 'plan_create of bfloat16')
    call mpiattn_plan_positions(plan, positions, status=status)
    allocate (q(4, 1, size(positions), 1), lse(size(positions), 1, 1))
    q = int(z'3F80', int16)  ! 1
    allocate (out(4, 1, size(positions), 1), source=0_int16)
    bits = mpiattn_array_of(c_loc(out), MPIATTN_BFLOAT16, shape(out), [1_int64, 4_int64, 4_int64, 4_int64])
    call mpiattn_forward(plan, mpiattn_array_of(c_loc(q), MPIATTN_BFLOAT16, shape(q)), &
      mpiattn_array_of(c_loc(q), MPIATTN_BFLOAT16, shape(q)), out=bits, lse=mpiattn_array_of(lse), status=status)
    call done(status, 'forward in bfloat16')
    call check(all(out == q) .and. all(abs(lse - 2) <= 0), 'bfloat16')
    call mpiattn_plan_free(plan, status)
  end subroutine

  ! A Cartesian communicator whose dims are in the order of a field, (px, py).
  subroutine field_plan()
    type(MPI_Comm) :: cart, by_y_and_x
    type(mpiattn_plan) :: plan, in_c_order
    integer, parameter :: nx = 9, ny = 7
    integer :: dims(2), coords(2), rank, px, py, x0, y0, bx, by, x, y, status
    integer(int64), allocatable :: positions(:)
    real(real32), allocatable :: q(:, :, :, :), out(:, :, :, :), other(:, :, :, :)
    character(100) :: text
    dims = 0
    call MPI_Dims_create(ranks, 2, dims)
    px = dims(1)
    py = dims(2)
    call MPI_Cart_create(MPI_COMM_WORLD, 2, [px, py], [.true., .false.], .false., cart)
    write (text, '(2(a, i0), a)') 'order=fortran, grid=', nx, 'x', ny, ', heads=2, head_dim=8'
    call mpiattn_plan_create(cart%MPI_VAL, trim(text) // ', mask=neighborhood 5x3 cyclic=0', plan, status)
    call done(status, 'plan_create with axes in the order of Fortran')
    call MPI_Comm_rank(cart, rank)
    call MPI_Cart_coords(cart, rank, 2, coords)
    call mpiattn_plan_positions(plan, positions, status=status)
    x0 = coords(1) * (nx / px) + min(coords(1), mod(nx, px))
    y0 = coords(2) * (ny / py) + min(coords(2), mod(ny, py))
    call check(all(positions == [((int(x + nx * y, int64), &
      x=x0, x0 + nx / px + merge(1, 0, coords(1) < mod(nx, px)) - 1), &
      y=y0, y0 + ny / py + merge(1, 0, coords(2) < mod(ny, py)) - 1)]), 'the blocks are others')
    bx = nx / px + merge(1, 0, coords(1) < mod(nx, px))
    by = ny / py + merge(1, 0, coords(2) < mod(ny, py))
    q = numbers([8, 2, bx * by, 1], 4000 * rank)
    allocate (out, other, mold=q)
    call mpiattn_forward(plan, q, q, q, out, status=status)
    call done(status, 'forward of a field')
    call mpiattn_forward(plan, reshape(q, [8, 2, bx, by]), q, q, out, status=status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'one axis, tokens = ')

    call MPI_Comm_split(cart, 0, coords(2) * px + coords(1), by_y_and_x)
    write (text, '(4(a, i0), a)') 'grid=', ny, 'x', nx, ', dims=', py, 'x', px, ', heads=2, head_dim=8'
    call mpiattn_plan_create(by_y_and_x%MPI_VAL, trim(text) // ', mask=neighborhood 3x5 cyclic=1', in_c_order, status)
    call done(status, 'plan_create with axes in the order of C')
    call mpiattn_forward(in_c_order, q, q, q, other, status=status)
    call check(status == MPIATTN_OK .and. all(abs(other - out) < 1e-5), 'the order of axes gives other numbers')
    call mpiattn_plan_create(cart%MPI_VAL, trim(text) // ', mask=neighborhood 3x5 grid=9x7', in_c_order, status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'layout is of a grid of 7x9')
    call mpiattn_plan_free(in_c_order, status)
    call mpiattn_plan_free(plan, status)
    call MPI_Comm_free(by_y_and_x)
    call MPI_Comm_free(cart)
  end subroutine

  subroutine caches(folder)
    character(*), intent(in) :: folder
    type(mpiattn_cache) :: cache, loaded
    type(mpiattn_options) :: options
    integer :: status
    integer(int64) :: value
    integer(int64), allocatable :: lengths(:), local(:), positions(:)
    real(real32), allocatable :: k(:, :, :, :), v(:, :, :, :), q(:, :, :, :), out(:, :, :, :), lse(:, :, :)
    real(real32), allocatable :: again(:, :, :, :)
    call mpiattn_cache_create(MPI_COMM_WORLD%MPI_VAL, 'capacity=64, sequences=2, kv_heads=2, head_dim=8', cache, status)
    call done(status, 'cache_create')
    k = numbers([8, 2, 9, 2], 1000)
    v = numbers([8, 2, 9, 2], 2000)
    q = numbers([8, 4, 3, 2], 3000)
    allocate (out, again, mold=q)
    allocate (lse(3, 4, 2))
    call mpiattn_options_create('counts=9,6', options, status)
    call mpiattn_cache_append(cache, k, v, options, status)
    call done(status, 'cache_append')
    call mpiattn_options_free(options, status)
    call mpiattn_cache_append(cache, k, status=status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'v ')
    call mpiattn_cache_truncate(cache, [8_int64, 6_int64], status=status)
    call done(status, 'cache_truncate')
    call mpiattn_cache_lengths(cache, lengths, status=status)
    call done(status, 'cache_lengths')
    call mpiattn_cache_lengths(cache, local, .true., status)
    call mpiattn_cache_positions(cache, 1, positions, status)
    call check(status == MPIATTN_OK .and. size(positions) == local(2), 'cache_positions')
    call put_integers('lengths', lengths)
    call put_integers('held', positions)
    call mpiattn_cache_positions(cache, 2, positions, status)
    call refused(status, MPIATTN_ERR_ARGUMENT, 'sequence')
    call mpiattn_cache_integer(cache, 'capacity', value, status)
    call check(value == 64, 'cache_integer')
    call mpiattn_options_create('', options, status)
    call mpiattn_set(options, 'scale', 0.5, status)
    call mpiattn_tree_decode(cache, q, out, lse, options, status)
    call done(status, 'tree_decode')
    call put('kept_k', shape(k), k)
    call put('kept_v', shape(v), v)
    call put('asked', shape(q), q)
    call put('decoded', shape(out), out)
    call put('decoded_lse', shape(lse), lse)
    call mpiattn_cache_save(cache, folder // '/cache.h5   ', status)
    call done(status, 'cache_save')
    call mpiattn_cache_load(MPI_COMM_WORLD%MPI_VAL, folder // '/cache.h5', loaded, status=status)
    call done(status, 'cache_load')
    call mpiattn_tree_decode(loaded, q, again, options=options, status=status)
    call check(status == MPIATTN_OK .and. all(abs(again - out) < 1e-5), 'a file gives other numbers')
    call mpiattn_cache_load(MPI_COMM_WORLD%MPI_VAL, folder // '/none.h5', loaded, status=status)
    call refused(status, MPIATTN_ERR_FILE, 'none.h5')
    call mpiattn_options_free(options, status)
    call mpiattn_cache_free(cache, status)
    call done(status, 'cache_free')
    call mpiattn_tree_decode(cache, q, out, status=status)
    call refused(status, MPIATTN_ERR_HANDLE, 'cache')
  end subroutine
end module

program fortran_calls
  use records
  implicit none
  character(500) :: folder, file
  character(:), allocatable :: version
  integer :: status
  call get_command_argument(1, folder)
  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, me)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  write (file, '(2a, i0)') trim(folder), '/calls.', me
  open (newunit=unit, file=file, access='stream', form='unformatted', status='replace')
  call mpiattn_start(status)
  call done(status, 'start')
  version = mpiattn_version()
  call check(version /= '', 'version')
  call masked_plan()
  call double_plan()
  call half_plan()
  call field_plan()
  call caches(trim(folder))
  call a_rank_that_does_not_come()
  close (unit)
  call MPI_Finalize()
  if (wrong /= 0) stop 1
end program
