// Common code of persistent GEMMs in clusters: the order of the tiles, and the release of a stage.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/mbarrier.cuh"

// The tiles of a cluster, one after the other, of p.rows x p.columns. They are numbered in groups of p.group rows,
// column by column: clusters that run at the same time then share rows of both operands in L2.
template <typename Arguments>
class Tiles {
  public:
    __device__ __forceinline__ Tiles(const Arguments& p, int cluster, int clusters)
        : p_(p), clusters_(clusters), at_(cluster) {}
    __device__ __forceinline__ bool next(int& row, int& column) {
        if (at_ >= p_.rows * p_.columns) return false;
        const int in_group = p_.group * p_.columns, first = at_ / in_group * p_.group;
        const int height = min(p_.group, p_.rows - first), rest = at_ % in_group;
        row = first + rest % height;
        column = rest / height;
        at_ += clusters_;
        return true;
    }

  private:
    const Arguments& p_;
    const int clusters_;
    int at_;
};

// A warp has read a stage: it arrives at the barriers of all blocks of the cluster, because each writes to it.
template <int CLUSTER, int STAGES>
__device__ __forceinline__ void release_in_cluster(MbarrierRing<STAGES>& ring, RingPosition<STAGES> at) {
    if constexpr (CLUSTER == 1) {
        ring.release(at);
    } else {
        __syncwarp();
        const int lane = threadIdx.x % WARP;
        if (lane < CLUSTER) mbarrier_arrive_cluster(map_shared_rank(&ring.empty[at.stage], lane));
    }
}
