// An HTTP/1.1 server on libmicrohttpd. One thread waits for all sockets, so that slow and idle connections cost a file
// descriptor each; a few threads run the handler.
//
// Throws Error where the address cannot be had.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace http {

constexpr int OK = 200, NO_CONTENT = 204, BAD_REQUEST = 400, UNAUTHORISED = 401, FORBIDDEN = 403, NOT_FOUND = 404,
              WRONG_METHOD = 405, TOO_LARGE = 413, FAILED = 500, UNAVAILABLE = 503;

struct Request {
    std::string method, path;
    std::map<std::string, std::string> headers;  // names in small letters; of equal names the last
    std::string body;

    // The value of a header; "" if it is not there.
    std::string header(const std::string& name) const;
};

using Headers = std::map<std::string, std::string>;

// The answer to a request, which any thread may give, at once or later. Functions that come too late do nothing.
class Reply {
  public:
    virtual ~Reply() = default;
    // The whole answer.
    virtual void send(int status, const std::string& type, std::string body) = 0;
    // An answer that grows: 200, then write() any number of times, then end(). end(false): it breaks off.
    virtual void begin(const std::string& type) = 0;
    virtual void write(std::string_view bytes) = 0;
    virtual void end(bool whole = true) = 0;
    // Of the answer that send() or begin() gives later.
    virtual void set_header(const std::string& name, const std::string& value) = 0;
    // `gone` is called once, by some thread, if the client goes away before the end; at once if it has gone. One that
    // closes its side of the connection alone counts as gone.
    virtual void on_gone(std::function<void()> gone) = 0;
    // Whether send() or begin() was called.
    virtual bool begun() const = 0;
};

struct Options {
    std::string host = "127.0.0.1";
    int port = 8080;              // 0: any free one
    int64_t max_body = 16 << 20;  // bytes; beyond it the answer is 413
    unsigned idle_seconds = 30;   // a connection on which nothing moves for so long is closed
    int handlers = 4;             // threads
    // Called when the headers of a request are there, if its body is not too large. What it returns is kept until the
    // handler has returned, or the request has ended without it.
    std::function<std::shared_ptr<void>(const Request&)> on_headers = nullptr;
};

class Server {
  public:
    // handle runs in one of several threads. It answers, or keeps the reply for later.
    using Handler = std::function<void(const Request&, const std::shared_ptr<Reply>&)>;
    // too_large: body of the answer 413, as application/json.
    Server(const Options& options, Handler handle, const std::string& too_large);
    // Answers that have ended reach their clients if those read them within a few seconds; the others break off.
    ~Server();
    int port() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl;
};

}  // namespace http
