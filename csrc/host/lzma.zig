//! LZMA, by Zig's standard library, which the compiler of the host's code brings along: a stream without a header.
const std = @import("std");
const lzma = std.compress.lzma;

/// Without it, code to print stack traces comes along.
pub const panic = std.debug.no_panic;

/// Fills `out`; false where `in` is no stream of so many bytes. `properties` is (pb * 5 + lp) * 9 + lc, as in .lzma files.
fn decompress(in: [*]const u8, in_size: usize, properties: u8, out: [*]u8, out_size: usize) callconv(.c) bool {
    if (properties >= 9 * 5 * 5) return false;
    var input: std.Io.Reader = .fixed(in[0..in_size]);
    const params: lzma.Decode.Params = .{
        .properties = .{ .lc = @intCast(properties % 9), .lp = @intCast(properties / 9 % 5), .pb = @intCast(properties / 45) },
        .dict_size = std.math.cast(u32, @max(out_size, 4096)) orelse return false,
        .unpacked_size = out_size,
    };
    const limit = std.math.maxInt(usize);
    var output = lzma.Decompress.initParams(&input, std.heap.c_allocator, &.{}, params, limit) catch return false;
    defer output.deinit();
    output.reader.readSliceAll(out[0..out_size]) catch return false;
    return true;
}

comptime {
    @export(&decompress, .{ .name = "cuops_decompress_lzma", .visibility = .hidden });
}
