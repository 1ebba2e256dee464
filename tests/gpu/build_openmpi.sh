#!/bin/sh
# Builds an Open MPI that takes device memory, where there is no CUDA, and packs it up for run_all.py --openmpi:
#
#   tests/gpu/build_openmpi.sh openmpi-cuda.tar.gz [FOLDER]
#
# FOLDER holds what is built (default: a temporary folder).  It takes 10 minutes of processor time, and needs a C compiler,
# make, dpkg-source, apt-get with the package lists of a Debian or Ubuntu release that has Open MPI 4.1, and pip.
# OPENMPI_SOURCE is a folder of Open MPI's unpacked sources, if apt-get is not to be asked; CUDA_HOME, if it is set, has
# include/cuda.h, which is all that is needed of CUDA: Open MPI 4.1 looks libcuda.so.1 up when it runs.
# The result can be unpacked anywhere: OPAL_PREFIX says where.
set -eu
archive=$(realpath "$1")
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
cd "$folder"

source=${OPENMPI_SOURCE:-}
if [ -z "$source" ]; then
    if [ -z "${APT_OPTIONS:-}" ] && ! apt-get indextargets 'Created-By: Sources' | grep -q .; then
        # This machine's lists name no sources: ask its own mirrors for them, with lists in this folder.
        mkdir -p apt/lists/partial apt/cache/archives/partial apt/sources.d
        for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
            [ ! -e "$list" ] || sed 's/^deb /deb-src /' "$list" >"apt/sources.d/$(basename "$list" .list).list"
        done
        for list in /etc/apt/sources.list.d/*.sources; do
            [ ! -e "$list" ] || sed 's/^Types:.*/Types: deb-src/' "$list" >"apt/sources.d/$(basename "$list")"
        done
        APT_OPTIONS="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$PWD/apt/sources.d
            -o Dir::State::Lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt/cache"
        apt-get $APT_OPTIONS -q update
    fi
    apt-get ${APT_OPTIONS:-} source --download-only openmpi
    dpkg-source --skip-patches --no-check -x openmpi_4.1*.dsc openmpi-source
    source=openmpi-source
fi
cuda=${CUDA_HOME:-}
if [ -z "$cuda" ]; then
    python3 -m pip download -q --no-deps --only-binary=:all: -d wheels nvidia-cuda-runtime
    python3 -m zipfile -e wheels/nvidia_cuda_runtime-*.whl headers
    cuda=$(dirname "$(dirname "$(find "$PWD/headers" -name cuda.h | head -n 1)")")
fi

source=$(realpath "$source")
mkdir -p build
cd build
"$source/configure" -q --prefix="$folder/openmpi" --with-cuda="$cuda" --enable-mpi-fortran=no --disable-oshmem \
    --disable-io-romio --without-ucx --without-ofi --without-verbs --without-psm2 --without-slurm --disable-libxml2 \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal CFLAGS="-O2 -g0"
make -s -j"$(nproc)" install
cd ..
rm -rf openmpi/include openmpi/share/man openmpi/lib/pkgconfig
find openmpi -name "*.la" -delete
find openmpi -name "*.so*" -type f -exec strip --strip-unneeded {} +
tar -czf "$archive.partial" openmpi
mv "$archive.partial" "$archive"
ls -l "$archive"
